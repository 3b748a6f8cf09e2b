"""The command line; nothing heavy is imported before a verb needs it."""
