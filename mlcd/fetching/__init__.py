"""Fetches images by URL: one strict parser, checked addresses, and a limit for every host."""
