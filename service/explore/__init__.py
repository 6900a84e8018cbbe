"""Groups and names a user's photographs on one page, for `mlcd explore`."""
