"""Study of FIRP's claims on the built-in model: pseudo hidden states of future tokens inside the backbone."""
