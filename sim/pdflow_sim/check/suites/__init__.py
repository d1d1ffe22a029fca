"""What `pdflow check` can be asked for, one file each: a function of the options that says what it found."""
