"""One file per drafting method; the file name is its key."""
