"""The incident's server: an HTTP front, and an engine in a child process under a byte budget."""
