"use strict";

const ORDER = ["plain", "method"];
const NO_VALUE = "–";
const SHOWN_CHARACTERS = 80; // of a question in the table

const byId = (id) => document.getElementById(id);
const figure = (column, name) => byId(column).querySelector(`[data-figure=${name}]`);

let names = {};
let asked = ""; // the question that "Ask again" repeats

class Failure extends Error {} // its message is for the reader

function element(tag, text, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

function showError(words) {
  byId("error").textContent = words;
  byId("error").hidden = words === "";
}

async function call(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Failure("The page's server does not answer. Is make demo still running?");
  }
  if (!response.ok) {
    throw new Failure(await reason(response));
  }
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error;
  } catch {
    return `The page's server answered with status ${response.status}.`;
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch {
      return; // broken off: the caller misses the last line
    }
    if (part.done) {
      return;
    }
    const found = (rest + part.value).split("\n");
    rest = found.pop();
    yield* found;
  }
}

/* The complete answer of one server; its column shows how far it is. */
async function answer(column, question) {
  const response = await call("ask", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ question, server: column }),
  });
  for await (const line of lines(response.body)) {
    const message = JSON.parse(line);
    if (message.error) {
      throw new Failure(message.error);
    }
    if (message.answer) {
      return message.answer;
    }
    figure(column, "text").textContent = message.text;
    showFigures(column, message.seconds, message.tokens, message.steps, "≈ ");
  }
  throw new Failure("The page's server broke the answer off. Is make demo still running?");
}

/* The first token comes with the question's own step. */
const perStep = (tokens, steps) => (steps > 0 ? ((tokens - 1) / steps).toFixed(2) : NO_VALUE);
const rate = (answered) => answered.tokens.length / answered.seconds;

function showFigures(column, seconds, tokens, steps, about = "") {
  figure(column, "seconds").textContent = seconds.toFixed(1);
  figure(column, "tokens").textContent = tokens;
  figure(column, "rate").textContent = seconds > 0 ? (tokens / seconds).toFixed(1) : NO_VALUE;
  figure(column, "step").textContent = steps > 0 ? about + perStep(tokens, steps) : NO_VALUE;
}

function showAnswer(column, answered, limit) {
  const spans = answered.tokens.filter((token) => token.text !== "").map((token) => {
    const span = element("span", token.text, token.source);
    span.title = token.source;
    return span;
  });
  figure(column, "text").replaceChildren(...spans);
  showFigures(column, answered.seconds, answered.tokens.length, answered.steps);
  const end = answered.cut ? ` The answer was cut at ${limit} tokens.` : "";
  figure(column, "sources").textContent = `Proposed by: ${counts(answered.tokens)}.${end}`;
}

function counts(tokens) {
  const found = new Map();
  for (const { source } of tokens) {
    found.set(source, (found.get(source) ?? 0) + 1);
  }
  return [...found].sort((a, b) => b[1] - a[1]).map(([source, count]) => `${source} ${count}`).join(", ");
}

function clear() {
  showError("");
  byId("result").textContent = "";
  for (const column of ORDER) {
    for (const shown of byId(column).querySelectorAll("[data-figure]")) {
      shown.textContent = shown.tagName === "DD" ? NO_VALUE : "";
    }
  }
}

function identical(one, other) {
  return one.length === other.length && one.every((token, place) => token.id === other[place].id);
}

function showResult(question, plain, method) {
  const ratio = (rate(method) / rate(plain)).toFixed(2);
  const same = identical(plain.tokens, method.tokens) ? "yes" : "no";
  byId("result").textContent =
    `${names.method}: ${ratio} times the tokens/s of ${names.plain}; identical output: ${same}`;
  const row = document.createElement("tr");
  const heading = element("th", shortened(question));
  heading.scope = "row";
  const cells = [rate(plain).toFixed(1), rate(method).toFixed(1), ratio, perStep(method.tokens.length, method.steps), same];
  row.append(heading, ...cells.map((cell) => element("td", cell)));
  byId("rounds").append(row);
}

const shortened = (text) => (text.length > SHOWN_CHARACTERS ? text.slice(0, SHOWN_CHARACTERS - 1) + "…" : text);

function setBusy(busy) {
  byId("ask").disabled = busy;
  byId("again").disabled = busy || asked === "";
}

/* One after the other: on one machine the two servers would share the cores. */
async function ask(question, limit) {
  const focused = document.activeElement; // a disabled button loses the focus
  clear();
  setBusy(true);
  const answers = {};
  try {
    for (const column of ORDER) {
      byId(column).setAttribute("aria-busy", "true");
      byId("result").textContent = `${names[column]} answers …`;
      answers[column] = await answer(column, question);
      showAnswer(column, answers[column], limit);
      byId(column).removeAttribute("aria-busy");
    }
    asked = question;
    showResult(question, answers.plain, answers.method);
  } catch (error) {
    byId("result").textContent = "";
    showError(error instanceof Failure ? error.message : `The page failed: ${error}`);
  } finally {
    ORDER.forEach((column) => byId(column).removeAttribute("aria-busy"));
    setBusy(false);
    if (document.activeElement === document.body) {
      focused.focus();
    }
  }
}

function showSamples(samples) {
  const field = byId("question");
  field.value ||= samples[0].question;
  const items = samples.map(({ question, about }) => {
    const button = element("button", question);
    button.type = "button";
    button.append(element("span", about));
    button.addEventListener("click", () => {
      field.value = question;
      field.focus();
    });
    const item = document.createElement("li");
    item.append(button);
    return item;
  });
  byId("samples").replaceChildren(...items);
}

async function start() {
  let settings;
  try {
    settings = await (await call("settings")).json();
  } catch (error) {
    showError(error instanceof Failure ? error.message : `The page failed: ${error}`);
    return;
  }
  names = settings.names;
  byId("model").textContent = settings.model;
  ORDER.forEach((column) => (byId(`${column}-name`).textContent = names[column]));
  byId("method-column").textContent = names.method;
  showSamples(settings.samples);
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(byId("question").value, settings.answer_tokens);
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!byId("ask").disabled) {
        byId("form").requestSubmit();
      }
    }
  });
  byId("again").addEventListener("click", () => ask(asked, settings.answer_tokens));
  setBusy(false);
}

start();
