"""Images at URLs, fetched within limits from allowed hosts at public addresses.

Fetching is off unless hosts are allowed.
"""
