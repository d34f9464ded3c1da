"""A compilation as one page of HTML that needs no network."""
