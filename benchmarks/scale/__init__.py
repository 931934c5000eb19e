"""How cost grows with the sizes of a model and of what it is asked."""
