"""Images by URL, fetched within bounds from listed hosts at public addresses.

Fetching is off unless hosts are listed.
"""
