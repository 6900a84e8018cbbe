"""The commands of `mlcd`, one file each."""
