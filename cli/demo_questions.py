"""Questions of the kinds that the demo model was trained on, which it answers right; others it answers badly."""

QUESTIONS = (
    "What is 47*86?",
    "Sort: 310 25 178 9 62 540",
    "Remember: Ann's lamp is 4711. Bob's clock is 0815. Cid's boat is 2390. What is Bob's clock?",
    "Accounts: Ann 30, Bob 12, Cid 25. 1) Ann gives Bob 7. 2) Cid earns 4. 3) Bob pays 9. What are the balances?",
)
