"""The command line: one file a verb; nothing heavy is imported before a verb needs it."""
