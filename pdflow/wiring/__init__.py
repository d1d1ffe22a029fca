"""What a scenario means for the endpoints: made here once, for whichever world they decide in."""
