"""Images by URL: fetched from hosts on a list, at public addresses, within bounds. Off unless hosts are listed."""
