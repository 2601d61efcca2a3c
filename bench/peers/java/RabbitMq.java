import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.MessageProperties;
import java.util.Random;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;

/**
 * Messages to a durable queue of RabbitMQ, and from it. Prints how many seconds they took.
 *
 * <pre>produce PORT QUEUE COUNT BYTES WINDOW   persistent messages; at most WINDOW are unconfirmed, 0: without confirms
 * consume PORT QUEUE COUNT WINDOW         from the first message on; at most WINDOW are unacknowledged, 0: without acks
 * delete PORT QUEUE</pre>
 */
public class RabbitMq {
    public static void main(String[] given) throws Exception {
        ConnectionFactory factory = new ConnectionFactory();
        factory.setHost("127.0.0.1");
        factory.setPort(Integer.parseInt(given[1]));
        try (Connection connection = factory.newConnection(); Channel channel = connection.createChannel()) {
            if (given[0].equals("delete")) {
                channel.queueDelete(given[2]);
                return;
            }
            int count = Integer.parseInt(given[3]);
            channel.queueDeclare(given[2], true, false, false, null);
            double seconds = given[0].equals("produce")
                    ? produce(channel, given[2], count, Integer.parseInt(given[4]), Integer.parseInt(given[5]))
                    : consume(channel, given[2], count, Integer.parseInt(given[4]));
            System.out.println(seconds);
        }
    }

    static double produce(Channel channel, String queue, int count, int bytes, int window) throws Exception {
        byte[] value = new byte[bytes];
        new Random(1).nextBytes(value);
        Semaphore room = new Semaphore(window);
        long[] confirmed = {0};
        if (window > 0) {
            channel.confirmSelect();
            channel.addConfirmListener((tag, multiple) -> {
                room.release(multiple ? (int) (tag - confirmed[0]) : 1);
                confirmed[0] = multiple ? tag : confirmed[0] + 1;
            }, (tag, multiple) -> {
                System.err.println("the broker refused a message");
                System.exit(1);
            });
        }
        long begun = System.nanoTime();
        for (int sent = 0; sent < count; sent++) {
            if (window > 0) {
                room.acquire();
            }
            channel.basicPublish("", queue, MessageProperties.PERSISTENT_BASIC, value);
        }
        if (window > 0) {
            channel.waitForConfirmsOrDie();
        }
        channel.queueDeclarePassive(queue); // a channel's requests are done one after the other
        return (System.nanoTime() - begun) / 1e9;
    }

    static double consume(Channel channel, String queue, int count, int window) throws Exception {
        CountDownLatch done = new CountDownLatch(1);
        long[] begun = {0};
        int[] seen = {0};
        channel.basicQos(window);
        channel.basicConsume(queue, window == 0, (tag, message) -> {
            if (seen[0]++ == 0) {
                begun[0] = System.nanoTime();
            }
            if (window > 0 && (seen[0] % Math.max(1, window / 2) == 0 || seen[0] == count)) {
                channel.basicAck(message.getEnvelope().getDeliveryTag(), true);
            }
            if (seen[0] == count) {
                done.countDown();
            }
        }, tag -> {});
        done.await();
        return (System.nanoTime() - begun[0]) / 1e9;
    }
}
