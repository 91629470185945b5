// A conversation is a tree: an edited question and a new answer stand beside the old ones, and
// nothing is lost. Each message names its parent; `leaf` is the last message of what is shown.

/** Return an empty conversation. */
export function newConversation() {
  return { id: newId(), title: "", created: Date.now(), updated: Date.now(), revision: 0, nodes: [], leaf: null };
}

/** Return a name that no other conversation has. */
export function newId() {
  const random = crypto.getRandomValues(new Uint32Array(2));
  return Date.now().toString(36) + "-" + [...random].map((one) => one.toString(36)).join("");
}

/** Add a message behind `parent` (null: the first one), show it, and return it. */
export function add(conversation, parent, message) {
  const node = { ...message, id: conversation.nodes.length, parent };
  conversation.nodes.push(node);
  conversation.leaf = node.id;
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node.content);
  return node;
}

const titleOf = (text) => text.trim().split("\n")[0].slice(0, 80);

/** Return the messages that are shown, first to last. */
export function path(conversation) {
  const nodes = [];
  for (let at = conversation.leaf; at !== null; at = nodes[0].parent) nodes.unshift(conversation.nodes[at]);
  return nodes;
}

/** Return the versions of a message, among them itself. */
export function versions(conversation, node) {
  return conversation.nodes.filter((one) => one.parent === node.parent && one.role === node.role);
}

/** Show another version of a message, with the latest that followed it. */
export function show(conversation, node) {
  let last = node;
  for (;;) {
    const next = conversation.nodes.findLast((one) => one.parent === last.id);
    if (!next) break;
    last = next;
  }
  conversation.leaf = last.id;
}

/** Return the messages of a request: the system prompt, and what is shown up to `leaf`. */
export function messagesOf(conversation, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const node of path(conversation)) {
    if (node.role !== "assistant") messages.push(asSent(node));
    else if (node.content || node.toolCalls.length) messages.push(answerOf(node));
    else if (messages.at(-1)?.role === "user") messages.pop(); // a question that failed would confuse the next
  }
  return messages;
}

function asSent(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.content };
  return { role: node.role, content: node.content };
}

function answerOf(node) {
  const message = { role: "assistant", content: node.content || null };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.toolCalls.length) {
    message.tool_calls = node.toolCalls.map((call) =>
      ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments || "{}" } }));
  }
  return message;
}

/** Return what is shown as Markdown, for a file. */
export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  for (const node of path(conversation)) {
    if (node.role === "user") parts.push(`## User\n\n${node.content}`);
    if (node.role === "tool") parts.push(`## Result of the tool\n\n${fenced(node.content)}`);
    if (node.role !== "assistant") continue;
    parts.push(`## ${node.model ?? "Assistant"}`);
    if (node.reasoning) parts.push(node.reasoning.trim().replace(/^/gm, "> "));
    if (node.content) parts.push(node.content);
    for (const call of node.toolCalls) parts.push(`Calls \`${call.name}\`:\n\n${fenced(call.arguments)}`);
  }
  return parts.join("\n\n") + "\n";
}

function fenced(text) {
  const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}
