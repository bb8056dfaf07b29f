"""One file per drafting method, named as in specdec/drafters: how it is trained."""
