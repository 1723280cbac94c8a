"""What the certificate finds, how soon, and that it leaves intact engines alone; see README.md."""
