"""Plan files for stock trainers: exact, or with every loss named and priced."""
