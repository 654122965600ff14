"""The `kvpersist` command."""
