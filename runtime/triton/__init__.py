"""A bundle as models of NVIDIA's Triton: the repository it loads, and the service in it."""
