"""The mosaics tier: pictures of one, two and four photographs, to see when several labels pay (E3).

A mosaic has four tiles. Its objects are one, two or four photographs of different classes, each in
as many tiles, so that the number of objects changes and the size of a tile does not.
"""
