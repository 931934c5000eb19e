"""Reading a bundle's graphs against what a target refuses, widens or ignores in silence."""
