"""The request for pictures: one definition of each parameter, and the values made of it."""
