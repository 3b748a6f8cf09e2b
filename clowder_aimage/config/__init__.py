"""The store, the configuration and the credentials of a user."""
