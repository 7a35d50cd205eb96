"""The command line: `sapwood VERB`, one module per verb, loaded when called."""
