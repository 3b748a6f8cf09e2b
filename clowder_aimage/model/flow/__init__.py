"""Flow-matching pipelines of all families: texts, noise, schedules, autoencoders.

A family has a folder beside this one, with its configurations, its transformer, and a value with
the members of ``FlowFamily``; CONTRIBUTING.md says how to add one.
"""
