"""Planning algorithms on plain numbers: no torch here."""
