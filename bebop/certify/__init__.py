"""The exactness certificate: does a live engine sample from the distribution that it claims?"""
