"""Operations of our own: thin layers over pure modules and the programs in files/."""
