"""Launch parameters: how many blocks and lanes, how large chunks; measured, guessed or given."""
