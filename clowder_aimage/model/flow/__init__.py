"""Flow-matching pipelines of all families: texts, noise, schedules, autoencoders.

A family has a folder beside this one, with its configurations, its transformer, and a subclass of
``FlowPipeline``; CONTRIBUTING.md says how to add one.
"""
