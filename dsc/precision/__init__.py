"""Number formats of matrix products: what they mean, which a target has, plans that choose them, and their control."""
