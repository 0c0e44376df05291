// The worker of route `js`: one JSON object per line in, one per line out.
//
// node rendering_js.mjs FOLDER, run in the folder that holds node_modules.
import { createRequire } from "node:module";
import { existsSync, readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { join } from "node:path";

const require = createRequire(join(process.cwd(), "package.json"));
const { Template } = require("@huggingface/jinja");
const { Tokenizer } = require("@huggingface/tokenizers");

const { folder, template, special } = JSON.parse(process.argv[2]);
const json = (name) => {
  const path = join(folder, name);
  return existsSync(path) ? JSON.parse(readFileSync(path, "utf8")) : {};
};
const tokenizer = new Tokenizer(json("tokenizer.json"), json("tokenizer_config.json"));
const compiled = new Template(template);

function render({ messages, tools, variables, add_generation_prompt }) {
  const text = compiled.render({
    ...special,
    ...variables,
    messages,
    tools,
    add_generation_prompt,
  });
  const { ids } = tokenizer.encode(text, { add_special_tokens: false });
  return { text, ids: Array.from(ids, Number) };
}

for await (const line of createInterface({ input: process.stdin, crlfDelay: Infinity })) {
  let answer;
  try {
    answer = render(JSON.parse(line));
  } catch (error) {
    answer = { refused: String(error.message ?? error) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
