// The peer: the official MCP TypeScript SDK serving the same echo over streamable HTTP, with no node behind it.
//
//     node mcp_peer.mjs PORT
//
// It is given its best: plain JSON answers instead of event streams, no sessions, Node's own HTTP server instead of a
// framework. Without sessions the SDK wants a server and a transport of its own for each request, as its page says.
import http from "node:http";
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { StreamableHTTPServerTransport } from "@modelcontextprotocol/sdk/server/streamableHttp.js";
import { z } from "zod";

function newServer() {
  const server = new McpServer({ name: "bench", version: "1" });
  server.registerTool(
    "echo",
    { description: "Send the text back.", inputSchema: { text: z.string() } },
    async ({ text }) => ({ content: [{ type: "text", text }] }),
  );
  return server;
}

http
  .createServer((request, response) => {
    const chunks = [];
    request.on("data", (chunk) => chunks.push(chunk));
    request.on("end", async () => {
      const transport = new StreamableHTTPServerTransport({ sessionIdGenerator: undefined, enableJsonResponse: true });
      const server = newServer();
      response.on("close", () => {
        transport.close();
        server.close();
      });
      await server.connect(transport);
      await transport.handleRequest(request, response, JSON.parse(Buffer.concat(chunks).toString()));
    });
  })
  .listen(Number(process.argv[2]), "127.0.0.1", () => console.log(`ready on ${process.argv[2]}`));
