"""The validation study: it asks if Eq. 5 is worth its cost at a size that anyone can repeat."""
