"""The database's tables, and one module for each kind of row."""
