"""The validation study: does Eq. 5 earn its place at a size that anyone can repeat?"""
