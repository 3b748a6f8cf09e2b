"""The node daemon: wanted models present on this machine, whatever happens."""
