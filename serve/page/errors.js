// What went wrong, and what to do about it, in words.

const TRY_AGAIN = "Regenerate the answer in a moment.";
const BY_CODE = {
  unreached: "See whether it runs, then regenerate the answer.",
  broken: TRY_AGAIN,
  context_length_exceeded: "Begin a new chat, or edit an earlier question, which drops what follows.",
  engine_dead: "It must be started anew.",
  unknown_host: "Open the page by one of the server's own names.",
};
const BY_STATUS = {
  400: "Correct it, then regenerate the answer.",
  413: "Begin a new chat, or send less text.",
  429: `The server is full. ${TRY_AGAIN}`,
  500: TRY_AGAIN,
  503: TRY_AGAIN,
  504: "Set a longest answer in Settings, and regenerate.",
};

/** An error of the server: `message`, and `status` and `code` where it told them. */
export class ServerError extends Error {
  constructor({ message, code }, status) {
    super(message);
    Object.assign(this, { code, status });
  }
}

export const unreached = () => new ServerError({ message: "The server cannot be reached.", code: "unreached" });
export const broken = () => new ServerError({ message: "The server closed the stream before its end.", code: "broken" });

/** The error for its reader. */
export function inWords({ message, code, status }) {
  const advice = BY_CODE[code] ?? BY_STATUS[status];
  return advice ? `${message}${/[.!?]$/.test(message) ? "" : "."} ${advice}` : message;
}
