"""One role a file; deploy.py calls them in the order in which things happen."""
