"""The explorer, a web page for people."""
