"""Functions of other libraries, in their names for the arguments of attention()."""
