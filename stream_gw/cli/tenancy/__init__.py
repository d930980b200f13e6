"""Commands that change the database of tenants. Each module is one command."""
