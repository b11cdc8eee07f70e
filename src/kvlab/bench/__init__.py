"""Side-by-side measurements behind ``kvlab bench``."""
