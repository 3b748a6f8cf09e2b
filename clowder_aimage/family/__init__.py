"""Families of image models: names and shapes of their tensors in all layouts, and their configs."""
