"""Reference of the HTTP API: a table of operations, and the OpenAPI document that is made from it."""
