"""Several engines on the machines of a Ray cluster: served over HTTP, or mapped over a data set of prompts.

Needs the extra ``[ray]``. A folder called ``ray`` would shadow Ray on a path that holds the checkout.
"""
