"""Several engines on the machines of a Ray cluster: served over HTTP, or mapped over a data set of prompts.

Needs the extra ``[ray]``. The folder is not called ``ray``: on a path that holds the checkout it would shadow the package.
"""
