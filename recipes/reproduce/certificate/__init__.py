"""Study of the certificate: what it finds, how soon, and that it raises no alarm on intact engines; see README.md."""
