"""Reference of the HTTP API: a table of operations, and the documents that are made from it."""
