"""The only room that touches processes, services, HTTP and files."""
