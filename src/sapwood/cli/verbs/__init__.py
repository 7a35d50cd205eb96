"""The verbs of the command line. Importing one of them must stay cheap: torch comes later."""
