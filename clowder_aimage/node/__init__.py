"""The node daemon: keeps the desired models present on this machine."""
